"""The paths of the web server for the report, for receipts, and for the commits that these are checked against."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from node.commands.receipts import receipt_file_name
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.receipt import ReceiptIssuer
from node.dashboard.ending.host_report import CurrentReport
from node.dashboard.report.run_report import REPORT_JSON, REPORT_MARKDOWN
from protocol.errors import MissingFileError, ReceiptError


def receipt_routes(issuer: ReceiptIssuer) -> list[Route]:
    """Return the routes of a host that keeps the commits of its run."""

    async def overview(_: Request) -> Response:
        return JSONResponse(issuer.overview())

    async def receipt(request: Request) -> Response:
        try:
            found = await issuer.issue(request.path_params["peer"])
        except (MissingFileError, ReceiptError) as error:  # the swarm switches to another chain at this moment
            raise HTTPException(503, f"{error}; try again") from error
        if found is None:
            raise HTTPException(404, "no commit of this run counts work of that peer")
        return Response(found.to_json(), media_type="application/json", headers=attachment(receipt_file_name(found)))

    async def commits(_: Request) -> Response:
        return FileResponse(issuer.path, media_type="application/octet-stream", filename=COMMIT_FILE_NAME)

    return [
        Route("/receipts.json", overview),
        Route("/receipts/{peer}.json", receipt),
        Route(f"/{COMMIT_FILE_NAME}", commits),
    ]


def report_routes(report: CurrentReport) -> list[Route]:
    """Return the routes of the report, which is that of the run so far before its end."""

    async def report_json(_: Request) -> Response:
        return JSONResponse(report.get().model_dump(mode="json"))

    async def report_markdown(_: Request) -> Response:
        return Response(
            report.get().markdown(), media_type="text/markdown; charset=utf-8", headers=attachment(REPORT_MARKDOWN)
        )

    return [Route(f"/{REPORT_JSON}", report_json), Route(f"/{REPORT_MARKDOWN}", report_markdown)]


def attachment(name: str) -> dict[str, str]:
    """Return the header that makes a browser save the answer under `name`, which has only plain characters."""
    return {"content-disposition": f'attachment; filename="{name}"'}
