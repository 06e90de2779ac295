{# What a C function that a plan's step calls takes, none of which lies in another's memory. #}
{% macro arguments(name) -%}
{% for function in call_functions() if function.name == name -%}
{% for operand in function.parameters %}
{{ operand.type }} {{ "__restrict " if operand.type[-1] == "*" }}{{ operand.name }}{{ ",\n    " if not loop.last }}
{%- endfor %}
{%- endfor %}
{%- endmacro %}
