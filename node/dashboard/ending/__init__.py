"""The end of a run on its page: the end screen, the report and the receipts."""
