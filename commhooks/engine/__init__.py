"""A bucket's path from the hook's call to its completed future, and the guards of state along it."""
