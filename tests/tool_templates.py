"""Chat templates that know tools, in the forms of well-known models."""

from __future__ import annotations

# As Hermes' and Qwen 2.5's: ChatML, calls between tags, results in the user's turn.
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\n</tools>\nA call is JSON between tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n\' }}{% endif %}'
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' '
    "+ (call.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 3's: tools in the first user message, a call is the whole turn.
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if loop.first and tools %}{{ 'Answer with JSON for a call: "
    '{"name": function name, "parameters": dictionary of names and values}.\n\' }}'
    "{% for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
# A form that is not read here: the name in an attribute.
OTHER = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>\n<function=' + call.function.name + '>' }}{% endfor %}{% endfor %}"
)
