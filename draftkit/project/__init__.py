"""`draftkit project`: what speculation would bring for a model, a cluster and a schedule that one does not have."""
