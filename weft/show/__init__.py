"""How plans and timelines look to people: tables and Gantt charts in the terminal, and a page for the browser."""
