"""Direct use of other curvature libraries, without laplace-torch; import the one that you need."""
