"""An MCP server with one tool, over stdin and stdout. Needs: pip install 'mcp>=2,<3'."""

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


if __name__ == "__main__":
    server.run(transport="stdio")
