"""The application: the API and the pages over one context."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from gradwire_http.browsers import BrowserGuard
from gradwire_shell.policy import ContentPolicy
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Match

from gradwire_feedback import pages
from gradwire_feedback.api import errors, feedback, policies, rankings, ratings, training
from gradwire_feedback.context import Context
from gradwire_feedback.settings import LIMITS

ROUTERS = (feedback.router, training.router, policies.router, ratings.router, rankings.router)
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create_application(context: Context) -> FastAPI:
    """Create the application for a context; the caller starts and stops its server and jobs."""
    app = FastAPIOffline(  # the files of /docs come from the package, for machines without internet
        redoc_url=None,
        title="gradwire feedback",
        version=version("gradwire"),
        summary="From people's scores to a better policy.",
        max_body_size=LIMITS.body_bytes,
        separate_input_output_schemas=False,
    )
    app.state.context = context
    names = (context.settings.host, *context.settings.host_names) if context.settings.loopback else None
    app.add_middleware(errors.ForeignPages, guard=BrowserGuard(names, pages=True))
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)

    @app.api_route("/api/{path:path}", methods=METHODS, include_in_schema=False)
    def unknown(request: Request) -> Response:
        """Answers requests that no other route of the API matches, which the pages' mount would answer with HTML."""
        allowed = sorted(
            {
                method
                for router in ROUTERS
                for route in router.routes
                if isinstance(route, APIRoute) and route.matches(request.scope)[0] is not Match.NONE
                for method in route.methods or ()
            }
        )
        if not allowed:
            raise HTTPException(404, f"{request.url.path} is not a path of the API, which /docs describes")
        raise HTTPException(
            405, f"{request.method} is not possible here: use {' or '.join(allowed)}", {"Allow": ", ".join(allowed)}
        )

    pages.mount(app, context)
    app.add_middleware(ContentPolicy)
    app.add_middleware(GZipMiddleware)
    return app
