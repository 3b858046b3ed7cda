"""What runs show: each one in numbers, means over seeds with intervals, and whether a hook pays."""
