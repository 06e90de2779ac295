"""From a template to compiled code: render, bind, compile in parallel and ahead, cache."""
