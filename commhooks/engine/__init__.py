"""A bucket's path from the hook's call to its completed future, and what guards state along it."""
