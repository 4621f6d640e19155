"""The expert-selection stage: the code around a loaded model that runs in every step."""
