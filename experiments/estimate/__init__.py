"""The estimate: the measurement of the costs that it uses, its request, and its output."""
