"""Tests of the main job: links, tasks, runs, the report, and the command line."""
