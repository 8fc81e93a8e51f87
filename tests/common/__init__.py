"""Tests of the room common."""
