"""Many processes: every one of them must end well."""
