"""What `commhooks estimate` and `commhooks plan` predict, beside real steps."""
