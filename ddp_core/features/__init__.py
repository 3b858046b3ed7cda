"""What a reducer does only if a program asks for it: one file for each of these features."""
