"""Tests of commhooks/seldom."""
