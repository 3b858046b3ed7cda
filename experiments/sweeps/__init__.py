"""Many runs in one folder: which to make, making them, following them, and keeping what is finished."""
