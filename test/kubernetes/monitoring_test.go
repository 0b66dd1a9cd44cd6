// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// metricsPorts are the ports on which the services serve metrics with the component monitoring.
var metricsPorts = map[string]int32{
	"identity": 64721, "ipam": 64722, "policy": 64723, "loadbalancer": 64724, "datapath": 64726, "dns": 64730,
	"controller": 64725,
}

// listening is the setting of a process with the address of its metrics.
var listening = regexp.MustCompile(`(?m)^metrics:\n  # \w+\n  address: (.+)$`)

// api is the address of an API server, set by the operator.
const api = "https://192.0.2.1:6443"

func monitored(t *testing.T) objects {
	t.Helper()
	return overlay{
		resources: []string{"base"}, components: []string{"monitoring"},
		settings: map[string]string{"kubernetesAPI": api},
	}.render(t)
}

// TestMonitoringScrapesEveryService: each service listens on the node's address, on the port that its container
// declares and the PodMonitor names. In the base no service listens.
func TestMonitoringScrapesEveryService(t *testing.T) {
	base := overlay{resources: []string{"base"}, settings: map[string]string{"kubernetesAPI": api}}.render(t)
	all := monitored(t)
	var scraped []string
	monitor := get[monitoringv1.PodMonitor](t, all, "PodMonitor/sluice")
	for _, e := range monitor.Spec.PodMetricsEndpoints {
		scraped = append(scraped, *e.Port)
	}
	for _, m := range monitor.Spec.Selector.MatchExpressions {
		names := []string{"sluice", "sluice-status"}
		if m.Key != "app.kubernetes.io/name" || m.Operator != "In" || !slices.Equal(m.Values, names) {
			t.Errorf("the monitor takes %+v, want the pods of both workloads", m)
		}
	}
	of := get[appsv1.Deployment](t, all, "Deployment/sluice-status").Spec
	elected := of.Template.Spec.Containers[0]
	if p := elected.Ports; len(p) != 1 || p[0].Name != "controller" || p[0].ContainerPort != metricsPorts["controller"] ||
		!slices.Contains(scraped, "controller") {
		t.Errorf("sluice-controller has the ports %+v, want %d, which the monitor names among %v",
			p, metricsPorts["controller"], scraped)
	}
	address := fmt.Sprintf("[$(NODE_ADDRESS)]:%d", metricsPorts["controller"])
	metrics := func(e corev1.EnvVar) bool { return e.Name == "SLUICE_CONTROLLER_METRICS_ADDRESS" }
	flag := func(a string) bool { return strings.HasPrefix(a, "--metrics-address") }
	if i := slices.IndexFunc(elected.Env, metrics); i < 0 || elected.Env[i].Value != address ||
		slices.ContainsFunc(elected.Args, flag) {
		t.Errorf("sluice-controller has %+v and %v, want the metrics on %s", elected.Env, elected.Args, address)
	}
	// Two processes with this port cannot share a node, so an update must not wait for a third node.
	if s := of.Strategy.RollingUpdate; s == nil || s.MaxSurge.IntValue() != 0 || s.MaxUnavailable.IntValue() != 1 {
		t.Errorf("the strategy of sluice-controller is %+v", s)
	}
	for _, c := range all.pod(t).Containers {
		port, ok := metricsPorts[c.Name]
		if !ok {
			if len(c.Ports) > 0 {
				t.Errorf("%s has ports: %+v", c.Name, c.Ports)
			}
			continue
		}
		if len(c.Ports) != 1 || c.Ports[0].ContainerPort != port || !slices.Contains(scraped, c.Ports[0].Name) {
			t.Errorf("%s: ports %+v, want %d, which the monitor names among %v", c.Name, c.Ports, port, scraped)
		}
		for of, want := range map[*objects]string{&all: fmt.Sprintf("'[127.0.0.1]:%d'", port), &base: "\"off\""} {
			configuration := of.configuration(t, c.Name)
			found := listening.FindStringSubmatch(configuration)
			if found == nil || strings.Trim(found[1], `'"`) != strings.Trim(want, `'"`) {
				t.Errorf("%s listens for metrics on %q, want %s:\n%s", c.Name, found, want, configuration)
			}
		}
	}
	if len(scraped) != len(metricsPorts) {
		t.Errorf("the monitor names %v, want one port of each of %v", scraped, metricsPorts)
	}
}

var (
	quoted    = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
	matchers  = regexp.MustCompile(`\{[^{}]*\}`)
	durations = regexp.MustCompile(`\[[^\[\]]*\]`)
	grouping  = regexp.MustCompile(`\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)`)
	word      = regexp.MustCompile(`\b[a-zA-Z_:][a-zA-Z0-9_:]*\b(\s*\()?`)
)

// metricNames returns the metrics in a PromQL expression: its words except labels, functions and operators.
func metricNames(expression string) (names []string) {
	e := quoted.ReplaceAllString(expression, " ")
	for _, drop := range []*regexp.Regexp{matchers, durations, grouping} {
		e = drop.ReplaceAllString(e, " ")
	}
	operators := []string{"and", "or", "unless", "bool", "offset"}
	for _, w := range word.FindAllString(e, -1) {
		if !strings.HasSuffix(w, "(") && !slices.Contains(operators, w) {
			names = append(names, w)
		}
	}
	return names
}

func TestMetricNamesOfAnExpression(t *testing.T) {
	for expression, want := range map[string]string{
		`up{job="sluice"} == 0`:                                                              "up",
		`absent(up{job="a b(c) }"})`:                                                         "up",
		`sum by (node, pool) (a_free{state="x"}) / sum (a_all) < 0.1`:                        "a_free a_all",
		`histogram_quantile(0.99, sum by (le) (rate(x_seconds_bucket{n=~"$n"}[5m])))`:        "x_seconds_bucket",
		`increase(a_total[$__rate_interval]) > 0 or on (node) b > bool 1 unless c offset 5m`: "a_total b c",
		`max(x:y) * on (pod) group_left (node) z`:                                            "x:y z",
	} {
		if got := strings.Join(metricNames(expression), " "); got != want {
			t.Errorf("%s: %s, want %s", expression, got, want)
		}
	}
}

// documented returns the metrics on the pages that the services' tests compare with the exported metrics.
func documented(t *testing.T) (names []string) {
	t.Helper()
	name := regexp.MustCompile("`((?:sluice|grpc)_[a-z_<>]+)`")
	for _, page := range []string{"process", "identity", "ipam", "policy", "loadbalancer", "datapath", "dns"} {
		content, err := os.ReadFile(filepath.Join("docs", "reference", page+".md"))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(content)) {
			cell, _, row := strings.Cut(strings.TrimPrefix(line, "| "), " |")
			if !row || !strings.HasPrefix(line, "| ") {
				continue
			}
			for _, m := range name.FindAllStringSubmatch(cell, -1) {
				if !strings.Contains(m[1], "<service>") {
					names = append(names, m[1])
					continue
				}
				for service := range metricsPorts {
					names = append(names, strings.ReplaceAll(m[1], "<service>", service))
				}
			}
		}
	}
	// Metrics of Prometheus itself, and of its client library in every process.
	return append(names, "up", "process_resident_memory_bytes", "process_cpu_seconds_total")
}

// exists reports whether a metric is documented, including the parts of a documented histogram.
func exists(documented []string, name string) bool {
	for _, part := range []string{"", "_bucket", "_sum", "_count"} {
		if base, ok := strings.CutSuffix(name, part); ok && slices.Contains(documented, base) {
			return true
		}
	}
	return false
}

// TestAlertsAndDashboardAskForMetricsThatExist: alerts and the dashboard use only existing metrics, and each alert has
// a section in the documentation.
func TestAlertsAndDashboardAskForMetricsThatExist(t *testing.T) {
	all, reference := monitored(t), documented(t)
	if exists(reference, "sluice_datapath_connections_lost") || !exists(reference, "sluice_datapath_connections") {
		t.Fatalf("the reference is not what the pages have: %v", reference)
	}
	expressions := map[string]string{} // location of each expression
	page, err := os.ReadFile(filepath.Join("docs", "operations", "monitoring.md"))
	if err != nil {
		t.Fatal(err)
	}
	var alerts []string
	for _, g := range get[monitoringv1.PrometheusRule](t, all, "PrometheusRule/sluice").Spec.Groups {
		for _, r := range g.Rules {
			alerts = append(alerts, r.Alert)
			expressions[r.Expr.String()] = r.Alert
			_, section, ok := strings.Cut(string(page), "\n### "+r.Alert+"\n")
			section, _, _ = strings.Cut(section, "\n#")
			if !ok || len(strings.TrimSpace(section)) == 0 {
				t.Errorf("%s has no section in docs/operations/monitoring.md", r.Alert)
			}
			url := "/docs/operations/monitoring.md#" + strings.ToLower(r.Alert)
			if !strings.HasSuffix(r.Annotations["runbook_url"], url) || r.Annotations["summary"] == "" ||
				r.Annotations["description"] == "" || !slices.Contains([]string{"critical", "warning"}, r.Labels["severity"]) {
				t.Errorf("%s lacks its section, a text or a severity: %v, %v", r.Alert, r.Annotations, r.Labels)
			}
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^### (Sluice\w+)$`).FindAllStringSubmatch(string(page), -1) {
		if !slices.Contains(alerts, m[1]) {
			t.Errorf("docs/operations/monitoring.md has %s, which is no alert", m[1])
		}
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	content := get[corev1.ConfigMap](t, all, "ConfigMap/sluice-dashboard").Data["sluice.json"]
	if err := json.Unmarshal([]byte(content), &dashboard); err != nil {
		t.Fatal(err)
	}
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			expressions[target.Expr] = "panel " + p.Title
		}
	}
	if len(alerts) == 0 || len(expressions) <= len(alerts) {
		t.Fatalf("%d alerts and %d expressions", len(alerts), len(expressions))
	}
	for e, where := range expressions {
		names := metricNames(e)
		if len(names) == 0 && !strings.HasPrefix(e, "vector(") {
			t.Errorf("%s asks for nothing: %s", where, e)
		}
		for _, name := range names {
			if !exists(reference, name) {
				t.Errorf("%s asks for %s, which no page has: %s", where, name, e)
			}
		}
	}
}
