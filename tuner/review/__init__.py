"""What a run found: tables, figures, the page, the dashboard, the notebook."""
