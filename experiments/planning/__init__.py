"""Asking beforehand: what a network costs, where a step's time goes, and which hook pays."""
