// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// quiet is the idle time before idle memory is measured: a process frees the memory of a burst about ten seconds
// afterwards.
const quiet = time.Minute

// thousand is the number of Services and of policies.
const thousand = 1000

// thousands logs the cost of a start of Sluice in a cluster without user Services and policies, and in one with a
// thousand of each.
func thousands(n sluiceNode) {
	n.countRequests()
	n.restarts("with nothing")
	c := n.client("thousands")
	n.namespace("thousands")
	begin := time.Now()
	n.many(thousand, func(i int) error {
		const space = "/namespaces/thousands/"
		post := func(path, body string, args ...any) error {
			return c.try("POST", "application/json", path, fmt.Sprintf(body, args...))
		}
		return errors.Join(
			post("/api/v1"+space+"services", `{"metadata":{"name":"service-%d"},"spec":{"ports":[{"port":80}]}}`, i),
			post("/apis/discovery.k8s.io/v1"+space+"endpointslices",
				`{"metadata":{"name":"slice-%[1]d","labels":{"kubernetes.io/service-name":"service-%[1]d"}},
"addressType":"IPv4","ports":[{"port":8080}],
"endpoints":[{"addresses":["10.244.%[2]d.%[4]d"]},{"addresses":["10.244.%[3]d.%[4]d"]}]}`,
				i, 100+i/200, 110+i/200, 2+i%200),
			post("/apis/networking.k8s.io/v1"+space+"networkpolicies",
				`{"metadata":{"name":"policy-%[1]d"},"spec":{"podSelector":{"matchLabels":{"app":"app-%[1]d"}},
"policyTypes":["Ingress"],
"ingress":[{"from":[{"podSelector":{"matchLabels":{"app":"client-%[1]d"}}}],"ports":[{"port":80}]}]}}`, i))
	})
	made := time.Since(begin)
	n.enforced()
	n.Logf("a thousand Services and policies were made in %.1f s, and enforced %.1f s after the first request",
		made.Seconds(), time.Since(begin).Seconds())
	n.memory("as they came")
	time.Sleep(quiet) // until all processes are idle
	n.memory("a minute after they came")
	n.restarts("with a thousand Services and policies")
	n.enforced()
	n.mapEntries()
	n.restarts("again")
}

// many calls do with the numbers 0 to count-1, a few at a time.
func (n sluiceNode) many(count int, do func(int) error) {
	n.Helper()
	const workers = 8
	done := make(chan error, workers)
	for w := range workers {
		go func() {
			var err error
			for i := w; i < count && err == nil; i += workers {
				err = do(i)
			}
			done <- err
		}()
	}
	var err error
	for range workers {
		err = errors.Join(err, <-done)
	}
	n.must(err)
}

// enforced waits until the kernel has all Services, and the policy service all policies.
func (n sluiceNode) enforced() {
	n.Helper()
	n.eventually("all are enforced", func() error {
		if out, err := n.sluice("status"); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var s struct {
			LoadBalancer struct{ Services int }
			Policy       struct{ Policies int }
		}
		if err := n.list(&s, "status"); err != nil {
			return err
		}
		if s.LoadBalancer.Services < thousand || s.Policy.Policies < thousand {
			return fmt.Errorf("%d services and %d policies", s.LoadBalancer.Services, s.Policy.Policies)
		}
		return nil
	})
}

// restarts replaces the pod of Sluice. It logs the time until it is Ready, the time until a pod that was created at
// once runs, each process's report of its start, and the resident memory a while later.
func (n sluiceNode) restarts(when string) {
	n.Helper()
	before := n.requestCount()
	old := n.sluicePod()
	begin := time.Now()
	n.kubectl("--namespace=sluice-system", "delete", "pod", old.Metadata.Name, "--wait=false")
	n.apply(`
apiVersion: v1
kind: Pod
metadata: {name: fresh, namespace: default}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 0
  containers: [{name: agnhost, image: "%s", args: [netexec, --http-port=8080]}]
`, image)
	var ready, runs time.Duration
	n.eventually("Sluice is Ready and a new pod runs", func() error {
		if p := n.sluicePod(); ready == 0 && p.Metadata.UID != "" && p.Metadata.UID != old.Metadata.UID &&
			len(p.Status.ContainerStatuses) > 0 {
			ready = time.Since(begin)
			for _, s := range p.Status.ContainerStatuses {
				if !s.Ready {
					ready = 0
				}
			}
		}
		if runs == 0 && n.pod("default", "fresh").Status.Phase == "Running" {
			runs = time.Since(begin)
		}
		if ready == 0 || runs == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	n.kubectl("delete", "pod", "fresh")
	pod := n.sluicePod()
	var starts []string
	for _, s := range pod.Status.ContainerStatuses {
		out := n.kubectl("--namespace=sluice-system", "logs", pod.Metadata.Name, "--container="+s.Name)
		for line := range strings.Lines(out) {
			var l struct{ Msg, Duration string }
			if json.Unmarshal([]byte(line), &l) == nil && l.Msg == "ready" && l.Duration != "" {
				starts = append(starts, s.Name+" "+l.Duration)
			}
		}
	}
	n.eventually("the status is as it should be", func() error {
		out, err := n.sluice("status")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	n.Logf("restart %s: Ready after %.1f s, a new pod runs after %.1f s, the status is clean after %.1f s; "+
		"each from its own start: %s; %d requests to the API server",
		when, ready.Seconds(), runs.Seconds(), time.Since(begin).Seconds(), strings.Join(starts, ", "),
		n.requestCount()-before)
	n.memory("right after the restart " + when)
	time.Sleep(quiet) // until all processes are idle
	n.memory("a minute after the restart " + when)
}

// mapEntries logs the number of entries of each map.
func (n sluiceNode) mapEntries() {
	n.Helper()
	var maps []struct {
		Name       string
		Entries    int64
		MaxEntries uint32
		Bytes      uint64
	}
	n.must(n.list(&maps, "map", "list"))
	var all []string
	bytes := uint64(0)
	for _, m := range maps {
		bytes += m.Bytes
		if m.Entries > 100 {
			all = append(all, fmt.Sprintf("%s %d of %d", m.Name, m.Entries, m.MaxEntries))
		}
	}
	slices.Sort(all)
	n.Logf("%d maps with %.1f MiB; entries %s", len(maps), float64(bytes)/(1<<20), strings.Join(all, ", "))
}
