"""The application: the API and the pages over one context."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from gradwire_feedback import pages
from gradwire_feedback.api import errors, feedback, policies, training
from gradwire_feedback.context import Context
from gradwire_feedback.settings import LIMITS

LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]


def create_application(context: Context) -> FastAPI:
    """Create the application for a context; the caller starts and stops its server and jobs."""
    app = FastAPI(
        title="gradwire feedback",
        version=version("gradwire"),
        summary="From people's scores to a better policy.",
        max_body_size=LIMITS.body_bytes,
        separate_input_output_schemas=False,
    )
    app.state.context = context
    # otherwise a foreign page could resolve its own name to this machine and read the answers
    if context.settings.loopback:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_NAMES)
    errors.install(app)
    for router in (feedback.router, training.router, policies.router):
        app.include_router(router)

    @app.get("/", include_in_schema=False)
    def home() -> RedirectResponse:
        return RedirectResponse("/docs")

    pages.mount(app, context)
    return app
