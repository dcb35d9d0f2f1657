"""Session mode: which kernel a call runs on (`registry`), one kernel's life (`kernel`, `states`), its wire (`link`)."""
