{{- /* The image of a container: (list $ NAME DIGEST), the latter the name of the digest in the values. */ -}}
{{- define "sluice.image" -}}
{{- $root := index . 0 }}
{{- $name := index . 1 }}
{{- $image := $root.Values.image }}
{{- $digest := index $image.digests (index . 2) }}
{{- $image.registry }}/{{ $name }}
{{- if $digest }}@{{ $digest }}{{ else }}:{{ $image.tag }}{{ end }}
{{- end }}

{{- /* A value as the text of a setting: lists and maps are separated by commas. */ -}}
{{- define "sluice.text" -}}
{{- $items := list }}
{{- if kindIs "slice" . }}
{{- range . }}{{ $items = append $items (include "sluice.text" .) }}{{ end }}
{{- join "," $items }}
{{- else if kindIs "map" . }}
{{- range $key, $value := . }}{{ $items = append $items (printf "%s=%s" $key (include "sluice.text" $value)) }}{{ end }}
{{- join "," $items }}
{{- else if kindIs "float64" . }}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- else }}
{{- . }}
{{- end }}
{{- end }}

{{- /* A variable of a container: (list NAME VALUE), none without a value. */ -}}
{{- define "sluice.variable" -}}
{{- $value := index . 1 }}
{{- if not (kindIs "invalid" $value) }}
- name: {{ index . 0 }}
  value: {{ include "sluice.text" $value | toJson }}
{{- end }}
{{- end }}

{{- /*
The annotations of pods: (list $ ANNOTATIONS SETTINGS). Pods that read the ConfigMap get its hash, so that a changed
setting restarts them. Without changes there is none, as with kustomize.
*/ -}}
{{- define "sluice.podAnnotations" -}}
{{- $root := index . 0 }}
{{- with index . 1 }}{{ toYaml . }}
{{ end }}
{{- if index . 2 }}
{{- $settings := include "sluice.settings" $root | fromYaml | toJson }}
{{- if ne $settings (include "sluice.defaultSettings" $root) }}
sluice.io/settings: {{ sha256sum $settings | trunc 16 | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The API servers, from the EndpointSlices that they write; none without a cluster, as with helm template. */ -}}
{{- define "sluice.kubernetesAPI" -}}
{{- $servers := list }}
{{- range (lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "").items }}
{{- if eq (dig "metadata" "labels" "kubernetes.io/service-name" "" .) "kubernetes" }}
{{- $port := dig "port" 443 (first .ports) }}
{{- range .endpoints }}
{{- range .addresses }}
{{- $servers = append $servers (printf (contains ":" . | ternary "https://[%s]:%v" "https://%s:%v") . $port) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- join "," (sortAlpha $servers) }}
{{- end }}
