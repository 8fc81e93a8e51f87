"""The tests, a package so that helpers import as tests.<name> and file names may repeat between folders."""
