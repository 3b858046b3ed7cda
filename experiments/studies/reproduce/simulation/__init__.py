"""The step-time model beside clusters that were measured, and beside published tables."""
