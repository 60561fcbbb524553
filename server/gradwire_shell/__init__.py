"""The shell that the pages of all applications share: navigation, theme, login form and components.

The console and the feedback service use it; it knows neither. Everything that a page loads comes from its own server.

May import: nicegui, uvicorn, gradwire_http. Nothing else of ours.
"""
