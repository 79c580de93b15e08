"""What people look at: tables on the screen."""
