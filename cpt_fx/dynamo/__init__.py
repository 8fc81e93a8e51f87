"""Models captured by Dynamo, as they run: every graph it finds is rewritten, whatever lies between is watched."""
