"""The estimate: measuring the costs that it uses, writing it, and comparing it with real steps."""
