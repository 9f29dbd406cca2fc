"""All that touches a user's model or process: accelerate and restore, patch, report, explain, inference."""
