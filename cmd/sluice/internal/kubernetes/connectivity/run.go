// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package connectivity

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/probe"
)

const (
	// pause is the interval between attempts of a check.
	pause = 500 * time.Millisecond
	// atOnce is the number of parallel checks.
	atOnce = 4
)

// kubePod contains the fields of a Pod that the command needs.
type kubePod struct {
	Metadata struct{ Name string }
	Status   struct {
		Phase             string
		Reason, Message   string
		PodIPs            []struct{ IP string }
		Conditions        []struct{ Type, Status string }
		ContainerStatuses []struct {
			State struct {
				Waiting *struct{ Reason, Message string }
			}
		}
	}
}

// runs reports whether the pod is ready, or else the reason.
func (p kubePod) runs() (bool, string) {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" && c.Status == "True" && len(p.Status.PodIPs) > 0 {
			return true, ""
		}
	}
	why := []string{"it is " + cmp.Or(p.Status.Phase, "not there")}
	if p.Status.Reason+p.Status.Message != "" {
		why = append(why, strings.TrimPrefix(p.Status.Reason+": "+p.Status.Message, ": "))
	}
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil {
			why = append(why, strings.TrimSuffix(w.Reason+": "+w.Message, ": "))
		}
	}
	return false, strings.Join(why, "; ")
}

// start creates the pods and the Service. The start of each pod is reported as a check; checks that use a pod which
// does not run are skipped.
func (t *tester) start(ctx context.Context) {
	plans := podPlans(t.env.nodes, t.hostPort)
	refused := map[string]error{}
	for _, p := range plans {
		if err := t.create(ctx, podOf(t.env.namespace, p, t.set)); err != nil {
			refused[p.name] = err
		}
	}
	created := t.create(ctx, serviceOf(t.env.namespace))
	pods := t.wait(ctx, len(plans)-len(refused))
	for _, p := range plans {
		r := result{
			Name: "start of pod " + p.name, From: p.node, Target: t.env.namespace + "/" + p.name, OK: true,
			Expected: "it runs within " + t.options.wait.String(), Got: "it runs",
		}
		ok, why := pods[p.name].runs()
		if err := refused[p.name]; err != nil {
			ok, why = false, err.Error()
		}
		if ok {
			for _, a := range pods[p.name].Status.PodIPs {
				t.env.addresses[p.name] = append(t.env.addresses[p.name], a.IP)
			}
			r.Got += " with " + strings.Join(t.env.addresses[p.name], ", ")
		} else {
			r.OK, r.Got = false, why
			r.Says = t.events(ctx, p.name)
			r.Next = t.client.Text("--namespace="+t.env.namespace, "describe", "pod", p.name)
		}
		t.add(ctx, r)
	}
	if created != nil {
		t.add(ctx, result{
			Name: "creation of the Service", From: "kubectl", Target: t.env.namespace + "/" + service, Expected: "it is created",
			Got: created.Error(), Next: t.client.Text("api-versions"),
		})
	}
}

// wait waits until want pods run, and returns their last state.
func (t *tester) wait(ctx context.Context, want int) map[string]kubePod {
	limited, cancel := context.WithTimeout(ctx, t.options.wait)
	defer cancel()
	pods := map[string]kubePod{}
	for {
		var list struct{ Items []kubePod }
		if err := t.client.Get(ctx, &list, "pods", "--namespace="+t.env.namespace); err == nil {
			running := 0
			for _, p := range list.Items {
				pods[p.Metadata.Name] = p
				if ok, _ := p.runs(); ok {
					running++
				}
			}
			if running >= want {
				return pods
			}
		}
		select {
		case <-limited.Done():
			return pods
		case <-time.After(time.Second):
		}
	}
}

// events returns the last events of a pod, which usually contain the reason for which it does not start.
func (t *tester) events(ctx context.Context, name string) []string {
	var list struct {
		Items []struct{ Reason, Message string }
	}
	if err := t.client.Get(ctx, &list, "events", "--namespace="+t.env.namespace,
		"--field-selector=involvedObject.name="+name); err != nil {
		return nil
	}
	var texts []string
	for _, e := range list.Items[max(0, len(list.Items)-3):] {
		texts = append(texts, e.Reason+": "+strings.Join(strings.Fields(e.Message), " "))
	}
	return texts
}

// discover reads the addresses and ports that were assigned to the created objects.
func (t *tester) discover(ctx context.Context) {
	type kubeService struct {
		Spec struct {
			ClusterIPs []string
			Ports      []struct{ Port, NodePort int }
		}
	}
	var mine, api kubeService
	// If an object cannot be read, the checks that need it are skipped with a note.
	if err := t.client.Get(ctx, &mine, "service", "--namespace="+t.env.namespace, service); err != nil {
		t.skip("what is about the Service", err.Error())
	}
	if err := t.client.Get(ctx, &api, "service", "--namespace=default", "kubernetes"); err != nil {
		t.skip("pod to the API server", err.Error())
	}
	t.env.clusterIP, t.env.api = mine.Spec.ClusterIPs, api.Spec.ClusterIPs
	if len(mine.Spec.Ports) > 0 {
		t.env.nodePort = mine.Spec.Ports[0].NodePort
	}
	if len(api.Spec.Ports) > 0 {
		t.env.apiPort = api.Spec.Ports[0].Port
	}
}

func (t *tester) skip(name, reason string) {
	t.report.Skipped = append(t.report.Skipped, skipped{name, reason})
	t.say("left out  %s: %s", name, reason)
}

// stage runs checks while a policy is enforced and after its deletion.
func (t *tester) stage(ctx context.Context, s stage) {
	if len(s.with)+len(s.then) == 0 || ctx.Err() != nil {
		return
	}
	name := s.policy["metadata"].(object)["name"].(string)
	r := result{
		Name: "creation of NetworkPolicy " + name, From: "kubectl", Target: t.env.namespace + "/" + name,
		Expected: "it is created",
	}
	if err := t.create(ctx, s.policy); err != nil {
		r.Got = err.Error()
		r.Next = t.client.Text("auth", "can-i", "create", "networkpolicies", "--namespace="+t.env.namespace)
		t.add(ctx, r)
		return
	}
	t.try(ctx, s.with)
	if _, err := t.client.Run(ctx, "--namespace="+t.env.namespace, "delete", "networkpolicy", name); err != nil {
		r.Name, r.Expected, r.Got = "deletion of NetworkPolicy "+name, "it is deleted", err.Error()
		t.add(ctx, r)
		return
	}
	t.try(ctx, s.then)
}

// try runs checks in parallel and reports their results in the given order.
func (t *tester) try(ctx context.Context, checks []check) {
	results := make([]*result, len(checks))
	var group errgroup.Group
	group.SetLimit(atOnce)
	for i, c := range checks {
		if c.after != "" && !t.passed(c.after) {
			continue
		}
		group.Go(func() error {
			r := t.check(ctx, c)
			results[i] = &r
			return nil
		})
	}
	_ = group.Wait()
	for i, c := range checks {
		if results[i] == nil {
			t.skip(c.name, fmt.Sprintf("%q did not pass", c.after))
			continue
		}
		t.add(ctx, *results[i])
	}
}

func (t *tester) passed(name string) bool {
	return slices.ContainsFunc(t.report.Checks, func(r result) bool { return r.Name == name && r.OK })
}

// add adds a result to the report, unless the check was interrupted.
func (t *tester) add(ctx context.Context, r result) {
	if ctx.Err() != nil {
		return
	}
	t.report.Checks = append(t.report.Checks, r)
	if r.OK {
		t.say("ok        %s (%s -> %s)", r.Name, r.From, r.Target)
		return
	}
	t.say("FAILED    %s", r.Name)
	t.say("          tried     %s -> %s", r.From, r.Target)
	t.say("          expected  %s", r.Expected)
	t.say("          got       %s", r.Got)
	for _, line := range r.Says {
		t.say("          explain   %s", line)
	}
	if r.Next != "" {
		t.say("          next      %s", r.Next)
	}
}

// check repeats attempts until one has the expected result or the time is over.
func (t *tester) check(ctx context.Context, c check) result {
	r := result{Name: c.name, From: cmp.Or(c.from, "node "+t.env.nodes[0].Name), Target: c.target, Expected: c.expected()}
	limited, cancel := context.WithTimeout(ctx, t.retry)
	defer cancel()
	for {
		a, err := t.attempt(ctx, c)
		if err != nil {
			r.Got = err.Error()
		} else {
			r.Got, r.OK = got(a), c.met(a)
		}
		if r.OK {
			return r
		}
		select {
		case <-limited.Done():
			r.Says, r.Next = t.explain(ctx, c)
			return r
		case <-time.After(pause):
		}
	}
}

func (t *tester) attempt(ctx context.Context, c check) (probe.Attempt, error) {
	args := append([]string{"--namespace=" + t.env.namespace, "exec", c.from, "--", "sluice"}, c.args()...)
	if c.from == "" {
		var err error
		if args, err = t.client.SluiceArgs(t.env.nodes[0], false, c.args()...); err != nil {
			return probe.Attempt{}, err
		}
	}
	// The exit code is ignored: the output contains the result.
	out, err := t.client.Run(ctx, args...)
	var a probe.Attempt
	if json.Unmarshal(out, &a) == nil && a.Outcome != "" {
		return a, nil
	}
	return a, cmp.Or(err, fmt.Errorf("unexpected output of the probe: %q", out))
}

// explain returns the verdict of the eBPF programs of the sender's node on such a packet, and the command for further
// analysis.
func (t *tester) explain(ctx context.Context, c check) ([]string, string) {
	if c.kind == resolves {
		return nil, t.client.Text("--namespace=kube-system", "get", "pods", "--selector=k8s-app=kube-dns", "--output=wide")
	}
	sender, node := t.address(c), t.nodeOf(c.from)
	if c.from == "" || sender == "" {
		return nil, fmt.Sprintf("%s observe --address=%s --since=1m", t.program, host(c.target))
	}
	to, port, err := net.SplitHostPort(c.target)
	if err != nil {
		return nil, ""
	}
	args := []string{"explain", "--from=" + sender, "--to=" + to, "--port=" + port}
	next, err := t.client.SluiceArgs(node, false, args...)
	if err != nil {
		return nil, ""
	}
	out, err := t.client.Sluice(ctx, node, args...)
	if err != nil {
		return nil, t.client.Text(next...)
	}
	return verdicts(string(out)), t.client.Text(next...)
}

// verdicts returns the lines of `sluice explain` with the verdict and the reason.
func verdicts(out string) []string {
	var lines []string
	for i, line := range strings.Split(out, "\n") {
		if i == 0 || strings.HasPrefix(line, "Egress,") || strings.HasPrefix(line, "Ingress,") ||
			strings.HasPrefix(line, "Service") {
			lines = append(lines, line)
		}
	}
	return lines
}

// address returns the sender's address of the target's family.
func (t *tester) address(c check) string {
	for _, a := range t.env.addresses[c.from] {
		if family(a) == family(host(c.target)) {
			return a
		}
	}
	return ""
}

func (t *tester) nodeOf(name string) kubectl.Node {
	if name == far || name == hostPort {
		return t.env.nodes[len(t.env.nodes)-1]
	}
	return t.env.nodes[0]
}
