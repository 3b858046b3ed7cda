"""Tests of commhooks/diloco."""
