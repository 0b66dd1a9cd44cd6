// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// helmChart is the directory of the chart.
const helmChart = "../../deploy/helm/sluice"

// helmPrograms are Helm 4 and Helm 3.
var helmPrograms = []string{"helm", "helm3"}

// helm runs a version of Helm with a directory of its own, by exec.CommandContext or another function that makes a
// command.
func helm(
	t *testing.T, command func(context.Context, ...string) (*exec.Cmd, error), program string, args ...string,
) (string, error) {
	t.Helper()
	path, err := filepath.Abs(filepath.Join(os.Getenv("SLUICE_BIN"), "tools", program))
	if err != nil {
		t.Fatal(err)
	}
	cmd, err := command(t.Context(), append([]string{path}, args...)...)
	if err != nil {
		return "", err
	}
	home := t.TempDir()
	cmd.Env = append(os.Environ(), "HOME="+home, "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// here makes a command of this machine.
func here(ctx context.Context, args ...string) (*exec.Cmd, error) {
	return exec.CommandContext(ctx, args[0], args[1:]...), nil //nolint:gosec // of this test
}

// TestHelmVersionsRenderTheSame lints and renders the chart by both versions of Helm, with the default values and with
// components and settings, and requires that both refuse unknown values by their names.
func TestHelmVersionsRenderTheSame(t *testing.T) {
	sources := regexp.MustCompile(`(?m)^(# Source: .*|---|)\n`)
	for name, values := range map[string][]string{
		"defaults": nil,
		"components": {
			"--set=components.etcdDev.enabled=true,components.hubble.enabled=true,components.etcdTls.enabled=true",
			"--set=components.monitoring.enabled=true,components.crds.enabled=true,components.etcdExternal.enabled=true",
			"--set=settings.kubernetesAPI={https://192.0.2.1:6443},containers.identity.settings.gc.grace=20m",
			"--set=shared.cluster.name=east,containers.loadbalancer.settings.limits.backends=12345678",
		},
		"uninstall": {"--set=components.uninstall.enabled=true"},
	} {
		rendered := map[string]string{}
		for _, program := range helmPrograms {
			for _, command := range [][]string{
				{"lint", "--strict", "--kube-version=1.36.0"}, {"template", "--kube-version=1.36.0", "sluice"},
			} {
				out, err := helm(t, here, program, append(append(command, helmChart), values...)...)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				rendered[program] = sources.ReplaceAllString(out, "")
			}
			_, err := helm(t, here, program, append([]string{
				"template", "--kube-version=1.36.0", "sluice", helmChart, "--set=containers.identity.settings.gc.grase=20m",
			}, values...)...)
			if err == nil || !strings.Contains(err.Error(), "grase") {
				t.Errorf("%s: %s: an unknown value: %v", program, name, err)
			}
		}
		if rendered["helm"] != rendered["helm3"] || !strings.Contains(rendered["helm"], "kind: DaemonSet") {
			t.Errorf("%s: the versions of Helm render different manifests:\n%s\n%s", name, rendered["helm"], rendered["helm3"])
		}
	}
}

// helmNode is a node on which a version of Helm installs the chart.
type helmNode struct {
	sluiceNode
	t       *testing.T
	program string
	etcd    string // the Deployment that the nodes use
}

// helm runs Helm for the release in the namespace kube-system.
func (n helmNode) helm(args ...string) string {
	n.Helper()
	args = append(args, "--kubeconfig="+n.c.Kubeconfig(), "--namespace=kube-system")
	out, err := helm(n.t, n.c.NetworkCommand, n.program, args...)
	n.must(err)
	return out
}

// settled waits until the pods run with the settings of the last change.
func (n helmNode) settled() {
	n.Helper()
	for _, what := range []string{"deployment/" + n.etcd, "deployment/sluice-status", "daemonset/sluice"} {
		n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", what)
	}
}

// logLevel returns the level of the container identity, "" for the default.
func (n helmNode) logLevel() string {
	n.Helper()
	return n.kubectl("--namespace=sluice-system", "get", "daemonset/sluice", "--output=jsonpath="+
		`{.spec.template.spec.containers[?(@.name=="identity")].env[?(@.name=="SLUICE_IDENTITY_LOG_LEVEL")].value}`)
}

// TestHelmInstallsUpgradesAndUninstalls installs the chart by each version of Helm on a cluster without a network and
// without the address of the API server, upgrades it, rolls it back, and removes it. Helm 4 installs it without values,
// Helm 3 with the development etcd. A TCP connection must survive both changes. Afterwards neither the node nor the API
// may have anything of Sluice.
func TestHelmInstallsUpgradesAndUninstalls(t *testing.T) {
	for _, program := range helmPrograms {
		t.Run(program, func(t *testing.T) {
			var images []string
			for _, name := range []string{"sluice", "sluice-devetcd"} {
				images = append(images, filepath.Join(os.Getenv("SLUICE_BIN"), "images", name+"-"+runtime.GOARCH+".tar"))
			}
			c := start(t, cluster.Options{NoCNI: true, Mounts: []string{programs()}, Images: images})
			n := helmNode{sluiceNode{t, c, 0}, t, program, "sluice-store"}
			install := []string{"install", "sluice", helmChart}
			if program == "helm3" {
				n.etcd, install = "etcd-dev", append(install, "--set=components.etcdDev.enabled=true")
			}
			begin := time.Now()
			notes := n.helm(install...)
			if strings.Contains(notes, "WARNING") {
				t.Errorf("the notes of a complete installation warn:\n%s", notes)
			}
			n.settled()
			n.kubectl("wait", "--for=condition=Ready", "--timeout=2m", "node", "--all")
			t.Logf("the node was Ready %.1f s after helm install", time.Since(begin).Seconds())
			n.kubectl("--namespace=kube-system", "rollout", "status", "--timeout=2m", "deployment/coredns")
			t.Log(n.helm("test", "sluice", "--timeout=3m"))
			s := n.pair()

			n.helm("upgrade", "sluice", helmChart, "--reuse-values",
				"--set=containers.identity.settings.log.level=debug,components.hubble.enabled=true")
			n.settled()
			if got := n.logLevel(); got != "debug" {
				t.Errorf("after the upgrade the log level of identity is %q, want debug", got)
			}
			if got := n.kubectl("--namespace=sluice-system", "get", "daemonset/sluice",
				"--output=jsonpath={.spec.template.spec.containers[*].name}"); !strings.Contains(got, "hubble") {
				t.Errorf("after the upgrade the containers are %s, without hubble", got)
			}
			s.alive()

			n.helm("rollback", "sluice", "1")
			n.settled()
			if got := n.logLevel(); got != "" {
				t.Errorf("after the rollback the log level of identity is %q", got)
			}
			s.unbroken("upgraded and rolled back")
			n.exact()

			n.kubectl("delete", "namespace", "pair", "--wait")
			n.helm("upgrade", "sluice", helmChart, "--reuse-values", "--set=components.uninstall.enabled=true")
			n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", "daemonset/sluice-uninstall")
			n.helm("uninstall", "sluice", "--wait", "--timeout=3m")
			n.eventually(n.name()+" has no trace of Sluice", func() error { return none(n.leftovers()) })
			got := n.kubectl("get", "namespaces,clusterroles,clusterrolebindings,flowschemas,prioritylevelconfigurations,"+
				"validatingadmissionpolicies,validatingadmissionpolicybindings", "--output=name")
			if strings.Contains(got, "sluice") {
				t.Errorf("the API still has %s", got)
			}
		})
	}
}
