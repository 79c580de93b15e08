"""What people look at: tables on the screen, and the report about many runs."""
