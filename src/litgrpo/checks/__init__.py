"""Start-up checks of sampling, training and reference."""
