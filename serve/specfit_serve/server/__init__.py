"""The decode loop behind an HTTP server that speaks OpenAI's protocol.

schema.py   what a request may ask for        app.py       routes, errors, streams
text.py     tokens to text, stop strings      replies.py   the JSON of answers
choices.py  one answer on its way out         metrics.py   the counters, by vLLM's names
live.py     between HTTP and the loop         running.py   both threads, from start to drain

The decode loop runs in the thread that calls `Server.run`, HTTP in one beside it.
"""
