"""Many runs in one folder: planned, executed, followed, and kept once finished."""
