"""How plans, schedules and placements look to people: tables and charts in the terminal, pictures, pages."""
