"""The way of a bucket, from the hook's call to its completed future, and what guards state on it."""
