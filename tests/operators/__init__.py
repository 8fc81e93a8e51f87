"""The list of operators: every row, in every frontend, under each of its names."""
