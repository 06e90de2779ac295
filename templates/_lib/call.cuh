// What a call and its steps are given; null is what a step does without.
struct Call {
{% for operand in call_operands %}
  {{ operand.type }} {{ operand.name }} = {{ "nullptr" if operand.type[-1] == "*" else "0" }};
{% endfor %}
};
