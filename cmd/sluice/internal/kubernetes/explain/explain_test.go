// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
)

// cluster is a fake kubectl for a cluster of node1 and node2, with pods of Sluice and of the namespace shop.
type cluster struct {
	t   *testing.T
	dir string
}

const kubectlScript = `#!/bin/sh
cd "$(dirname "$0")" || exit 1
echo "$*" >>asked
case "$*" in
*" --field-selector=metadata.name="*) cat "pod-${*##*metadata.name=}" 2>/dev/null || echo '{"items": []}' ;;
"get --output=json pods "*) cat sluice-pods ;;
"get --output=json daemonsets "*) echo '{"items": [{"metadata": {"name": "sluice"}}]}' ;;
"get --output=json nodes") echo '{"items": [{"metadata": {"name": "node1"}}, {"metadata": {"name": "node2"}}]}' ;;
*" exec sluice-node"*)
	node=${*##*exec sluice-} to=${*##*--to=}
	file="${node%% *}-${to%% *}"
	[ -e "$file" ] && exec cat "$file"
	echo "sluice: sluice-datapath does not answer" >&2
	exit 1
	;;
*) echo "unexpected: $*" >&2; exit 2 ;;
esac
`

func newCluster(t *testing.T) cluster {
	c := cluster{t, t.TempDir()}
	c.write("kubectl", kubectlScript)
	if err := os.Chmod(filepath.Join(c.dir, "kubectl"), 0o700); err != nil {
		t.Fatal(err)
	}
	var pods []string
	for _, node := range []string{"node1", "node2"} {
		pods = append(pods, fmt.Sprintf(`{"metadata": {"name": "sluice-%[1]s"}, "spec": {"nodeName": %[1]q, "containers": `+
			`[{"name": "cni"}]},
			"status": {"phase": "Running", "containerStatuses": [{"name": "cni", "state": {"running": {}}}]}}`, node))
	}
	c.write("sluice-pods", `{"items": [`+strings.Join(pods, ",")+`]}`)
	c.pod("client", "node1", "10.244.0.2")
	c.pod("web", "node2", "10.244.1.2")
	c.pod("cart", "node1", "10.244.0.3")
	c.pod("new", "", "")
	return c
}

func (c cluster) write(name, text string) {
	c.t.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

func (c cluster) pod(name, node, address string) {
	c.write("pod-"+name, fmt.Sprintf(`{"items": [{"spec": {"nodeName": %q}, "status": {"phase": "Pending", "podIPs": `+
		`[{"ip": %q}]}}]}`,
		node, address))
}

// answer returns the output of `sluice explain` on a node for an address.
func (c cluster) answer(node, to, text string) { c.write(node+"-"+to, text) }

// run executes the command and returns the commands that kubectl executed in pods.
func (c cluster) run(args ...string) (code int, out, errOut string, executed []string) {
	c.t.Helper()
	if err := os.RemoveAll(filepath.Join(c.dir, "asked")); err != nil {
		c.t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	code = invocation.Run(append(args, "--kubectl="+filepath.Join(c.dir, "kubectl")), &stdout, &stderr,
		func(inv *invocation.Invocation) *cobra.Command {
			client := &kubectl.Client{}
			cmd := Command(inv, client)
			client.Flags(cmd.Flags(), inv)
			return cmd
		})
	asked, err := os.ReadFile(filepath.Join(c.dir, "asked"))
	if err != nil && !os.IsNotExist(err) {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(asked)) {
		if _, command, ok := strings.Cut(strings.TrimSpace(line), " exec sluice-"); ok {
			executed = append(executed, strings.Replace(command, " --container=cni -- sluice", "", 1))
		}
	}
	return code, stdout.String(), stderr.String(), executed
}

const (
	forwards = `{"verdict": "forwarded", "reason": "forwarded-overlay", "source": {"identity": 300},
		"destination": {"identity": 301, "nodeName": "node2"}, "egress": {"verdict": {"verdict": "forwarded",
			"decidedBy": "no-policy", "table": 1}},
		"notAsked": [{"node": "node2", "has": "receiver"}]}`
	drops = `{"verdict": "dropped", "reason": "policy-denied", "source": {"identity": 300, "nodeName": "node1"},
		"destination": {"identity": 301}, "ingress": {"verdict": {"verdict": "dropped", "decidedBy": "rule", "rule": 2,
		"ruleSources": ["NetworkPolicy shop/web isolation"]}}}`
	lets = `{"verdict": "forwarded", "reason": "forwarded-from-stack", "source": {"identity": 300, "nodeName": "node1"},
		"destination": {"identity": 301}, "ingress": {"verdict": {"verdict": "forwarded", "decidedBy": "rule", "rule": 1,
		"ruleSources": ["NetworkPolicy shop/web spec.ingress[0]"]}}, "notAsked": [{"node": "node1", "has": "sender"}]}`
)

func TestBothNodesAreAskedAndADropOfEitherIsTheVerdict(t *testing.T) {
	c := newCluster(t)
	c.answer("node1", "10.244.1.2", forwards)
	c.answer("node2", "10.244.1.2", drops)
	code, out, errOut, executed := c.run("explain", "--from", "shop/client", "--to", "shop/web", "--port", "8080")
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, errOut)
	}
	for _, want := range []string{
		"shop/client 10.244.0.2 -> shop/web 10.244.1.2, tcp port 8080: DROPPED by node2 (policy-denied)\n",
		"node1  sender    10.244.1.2  FORWARDED (forwarded-overlay)  egress forwarded because no policy selects it\n",
		"node2  receiver  10.244.1.2  DROPPED (policy-denied)        ingress dropped by NetworkPolicy shop/web isolation\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("want %q in\n%s", want, out)
		}
	}
	for _, node := range []string{"node1", "node2"} {
		want := node + " explain --from=10.244.0.2 --to=10.244.1.2 --port=8080/tcp --output=json --timeout=10s"
		if !strings.Contains(strings.Join(executed, "\n"), want) {
			t.Errorf("want %q executed, got %q", want, executed)
		}
	}

	c.answer("node2", "10.244.1.2", lets)
	if _, out, _, executed = c.run("explain", "--from", "shop/client", "--to", "shop/web", "--icmp",
		"echo"); len(executed) != 2 ||
		!strings.Contains(out, ": FORWARDED by node1 and node2\n") || !strings.Contains(executed[0], " --icmp=8/0 ") {
		t.Errorf("asked %q\n%s", executed, out)
	}
	// The first answer has the node of the pod with the address.
	if _, out, _, executed = c.run("explain", "--from", "shop/client", "--to", "10.244.1.2", "--port",
		"80"); len(executed) != 2 ||
		!strings.Contains(out, "shop/client 10.244.0.2 -> 10.244.1.2, tcp port 80: FORWARDED by node1 and node2\n") {
		t.Errorf("asked %q\n%s", executed, out)
	}
	if _, out, _, executed = c.run("explain", "--from", "10.244.0.2", "--to", "shop/web", "--port", "80", "-o",
		"json"); len(executed) != 2 {
		t.Errorf("asked %q\n%s", executed, out)
	}
	var x Explanation
	if err := json.Unmarshal([]byte(out), &x); err != nil || x.Verdict != "forwarded" || len(x.Answers) != 2 ||
		x.Answers[0].Has != "sender" || x.Answers[1].Explanation.GetIngress().GetVerdict().GetRule() != 1 {
		t.Errorf("%v, %+v", err, x)
	}
}

func TestPodsOfOneNodeAreAskedAboutOnce(t *testing.T) {
	c := newCluster(t)
	c.answer("node1", "10.244.0.3", `{"verdict": "audited", "reason": "forwarded-to-pod", "source": {}, "destination": `+
		`{}}`)
	_, out, _, executed := c.run("explain", "--from", "shop/client", "--to", "shop/cart", "--protocol", "47")
	if len(executed) != 1 || !strings.Contains(executed[0], " --protocol=47 ") || !strings.Contains(out,
		": AUDITED by node1\n") {
		t.Errorf("asked %q\n%s", executed, out)
	}
}

func TestANodeThatDoesNotAnswerIsNamed(t *testing.T) {
	c := newCluster(t)
	c.answer("node1", "10.244.1.2", forwards)
	code, out, errOut, _ := c.run("explain", "--from", "shop/client", "--to", "shop/web", "--port", "80")
	if code != invocation.ExitFailed || !strings.Contains(out, ": UNKNOWN\n") ||
		!strings.Contains(errOut, "node2: sluice explain: sluice: sluice-datapath does not answer") {
		t.Errorf("exit code %d\n%s%s", code, out, errOut)
	}
	// A drop on one node is the verdict, even if the other node does not answer.
	if err := os.Rename(filepath.Join(c.dir, "node1-10.244.1.2"), filepath.Join(c.dir, "unused")); err != nil {
		t.Fatal(err)
	}
	c.answer("node2", "10.244.1.2", drops)
	code, out, _, _ = c.run("explain", "--from", "shop/client", "--to", "shop/web", "--port", "80")
	if code != invocation.ExitFailed || !strings.Contains(out, ": DROPPED by node2 (policy-denied)\n") {
		t.Errorf("exit code %d\n%s", code, out)
	}
	// --node excludes the sender's node.
	code, _, errOut, _ = c.run("explain", "--from", "shop/client", "--to", "shop/web", "--port", "80", "--node", "node2")
	if code != invocation.ExitFailed ||
		!strings.Contains(errOut, "node1: sluice explain: the node is not in the cluster or not in --node") {
		t.Errorf("exit code %d: %s", code, errOut)
	}
}

// TestTheNodeOfEachBackendIsAsked: the command calls the node of each backend of a Service to explain the connection to
// it. It does not call the sender's node again, which has explained all backends.
func TestTheNodeOfEachBackendIsAsked(t *testing.T) {
	c := newCluster(t)
	backend := func(address, node, verdict string) string {
		return fmt.Sprintf(`{"address": %q, "port": 8080, "path": "evaluated", "verdict": %q, "reason": "r", "peer": `+
			`{"identity": 301,
			"nodeName": %q}}`, address, verdict, node)
	}
	c.answer("node1", "10.96.0.10", `{"reason": "", "verdict": "", "source": {"identity": 300}, "service": {"service": `+
		`"shop/web",
		"outcome": "translated", "backendCount": 3, "backends": [`+strings.Join([]string{
		backend("10.244.1.2", "node2", "forwarded"), backend("10.244.0.3", "", "forwarded"), backend("10.244.1.9", "node2",
			"dropped"),
	}, ",")+`]}}`)
	c.answer("node2", "10.244.1.2", lets)
	_, out, _, executed := c.run("explain", "--from", "shop/client", "--to", "10.96.0.10", "--port", "80")
	if len(executed) != 2 || !strings.HasPrefix(executed[1], "node2 explain --from=10.244.0.2 --to=10.244.1.2 "+
		"--port=8080/tcp ") {
		t.Errorf("asked %q", executed)
	}
	if !strings.Contains(out, ": DEPENDS ON THE BACKEND\n") || strings.Count(out, "sender ") != 3 || strings.Count(out,
		"backend ") != 1 {
		t.Errorf("got\n%s", out)
	}
	c.answer("node1", "10.96.0.11", `{"verdict": "", "reason": "", "source": {}, "service": {"outcome": "no-backend"}}`)
	if _, out, _, _ = c.run("explain", "--from", "shop/client", "--to", "10.96.0.11", "--port",
		"80"); !strings.Contains(out,
		"tcp port 80: REFUSED (no backend)\n") {
		t.Errorf("got\n%s", out)
	}
}

func TestEndsThatNoNodeCanBeAskedAboutAreRefused(t *testing.T) {
	c := newCluster(t)
	for _, bad := range []struct {
		from, to, err string
		code          int
	}{
		{"10.0.0.1", "10.0.0.2", "one end must be a pod NAMESPACE/NAME", invocation.ExitUsage},
		{"shop/client", "web", `--to: "web" is not a pod NAMESPACE/NAME, or an address`, invocation.ExitUsage},
		{"shop/client", "a/b/c", `--to: "a/b/c" is not`, invocation.ExitUsage},
		{"shop/client", "", "--to: ", invocation.ExitUsage},
		{"shop/client", "127.0.0.1", "loopback", invocation.ExitUsage},
		{"shop/client", "fd00::1", "no addresses of the same family", invocation.ExitUsage},
		{"shop/client", "shop/absent", "pod shop/absent not found", invocation.ExitFailed},
		{"shop/new", "shop/web", "the pod shop/new has no address yet: its phase is Pending", invocation.ExitFailed},
	} {
		code, _, errOut, executed := c.run("explain", "--from", bad.from, "--to", bad.to, "--port", "80")
		if code != bad.code || !strings.Contains(errOut, bad.err) || len(executed) > 0 {
			t.Errorf("%+v: exit code %d, asked %q: %s", bad, code, executed, errOut)
		}
	}
}
