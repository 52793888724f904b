"""The figures that Warmgate promises, measured in one run as ratios against what cannot be avoided."""
