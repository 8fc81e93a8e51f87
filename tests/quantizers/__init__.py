"""Tests of formats, recipes, quantizer arithmetic, ops, and evidence."""
