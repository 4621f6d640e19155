"""The expert-selection stage around a loaded model: what runs in every step."""
