"""The papers' tables and figures as runnable studies, one file a paper."""
