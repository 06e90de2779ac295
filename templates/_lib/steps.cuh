// The C functions that a plan's steps call, each by the template's own function for that step.
{% for function in call_functions() %}

extern "C" const char* {{ function.name }}(
{% for operand in function.parameters %}
    {{ operand.type }} {{ operand.name }},
{% endfor %}
    void* stream) {
  Call call;
{% for operand in function.parameters %}
  call.{{ operand.name }} = {{ operand.name }};
{% endfor %}
  return {{ function.short }}_step(call, stream);
}
{% endfor %}
