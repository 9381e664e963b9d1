"""What curvature is used for: damped Gauss-Newton steps."""
