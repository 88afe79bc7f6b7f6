"""Views: one leader's attempt to decide a round, and the quorums that do."""
