"""The expert-selection stage: code that selects experts in each step of a loaded model, and reports the selections."""
