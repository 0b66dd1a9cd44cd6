#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The Sluice Authors
"""Connects network namespaces by gRPC, without CNI, as examples/go does.

docs/use-without-cni.md explains the calls. The modules below sluice/ are
generated from proto/ into a directory of PYTHONPATH:

    apt install python3-grpcio protobuf-compiler protobuf-compiler-grpc libprotobuf-dev
    mkdir -p OUT
    protoc --proto_path=proto --proto_path=third_party/protovalidate \\
        --python_out=OUT --grpc_python_out=OUT \\
        --plugin=protoc-gen-grpc_python=/usr/bin/grpc_python_plugin \\
        $(cd proto && find sluice -name '*.proto') buf/validate/validate.proto
    PYTHONPATH=OUT examples/python/client.py connect /run/netns/web web app=web
"""

import argparse
import contextlib
import os
import random
import sys
import threading
import time

import grpc
from sluice.datapath.v1 import datapath_pb2, datapath_pb2_grpc
from sluice.ipam.v1 import ipam_pb2, ipam_pb2_grpc
from sluice.policy.v1 import policy_pb2, policy_pb2_grpc
from sluice.workload.v1 import workload_pb2

# The name of this program. Endpoints and policies carry it, and reclaim and
# set_policies change no others.
MANAGER = "example"

# Codes of calls that may succeed later.
TEMPORARY = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}


class Node:
    """The services of one node."""

    def __init__(self, run_dir, timeout):
        self.deadline = time.monotonic() + timeout
        self.run_dir = run_dir
        # A local service that restarts is back soon.
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]

        def channel(service):
            path = os.path.abspath(os.path.join(run_dir, service, service + ".sock"))
            return grpc.insecure_channel("unix:" + path, options)  # services check peer credentials

        self.ipam = ipam_pb2_grpc.IPAMServiceStub(channel("ipam"))
        self.datapath = datapath_pb2_grpc.DatapathServiceStub(channel("datapath"))
        self.policy = policy_pb2_grpc.PolicyServiceStub(channel("policy"))

    def call(self, method, request):
        """Makes a call, which waits for an absent service, and repeats it while it may
        succeed later. All calls of this program are idempotent."""
        delay = 0.05
        # A person should know what a command waits for.
        note = f"client: no answer after a second; waiting for the services below {self.run_dir}"
        timer = threading.Timer(1, print, [note], {"file": sys.stderr, "flush": True})
        timer.start()
        try:
            return self.repeat(method, request, delay)
        finally:
            timer.cancel()

    def repeat(self, method, request, delay):
        """Makes a call until it succeeds, its error is final, or the time is over."""
        while True:
            try:
                return method(request, wait_for_ready=True, timeout=max(0, self.deadline - time.monotonic()))
            except grpc.RpcError as error:
                # Jitter, so that many callers do not retry at once.
                wait = delay * random.uniform(1, 1.5)
                if error.code() not in TEMPORARY or time.monotonic() + wait > self.deadline:
                    raise
            time.sleep(wait)
            delay = min(2 * delay, 2)

    def connect(self, owner, netns, labels):
        """Gives the network namespace an interface. If it fails, it undoes what it did."""
        while True:
            lease = self.call(self.ipam.Allocate, ipam_pb2.AllocateRequest(owner=owner)).allocation
            request = datapath_pb2.CreateEndpointRequest(
                owner=owner,
                network_namespace=netns,
                labels=labels,
                manager=MANAGER,
                addresses=[a.address for a in lease.addresses],
            )
            if lease.HasField("lease_expire_time"):
                request.lease_expire_time.CopyFrom(lease.lease_expire_time)
            try:
                # The datapath confirms the lease itself, before the device is up.
                return self.call(self.datapath.CreateEndpoint, request).endpoint
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION and lost_lease(error):
                    if time.monotonic() < self.deadline:
                        time.sleep(0.05)
                        continue  # ipam has restarted, or this took longer than the lease
                # Addresses that were confirmed before belong to an endpoint that an
                # earlier call made: it stays.
                if lease.state == ipam_pb2.ALLOCATION_STATE_LEASED:
                    self.undo(owner)
                raise

    def undo(self, owner):
        """Removes what a failed connect may have left. It has a deadline of its own."""
        # The answer of CreateEndpoint may have been lost: only the datapath knows.
        deleted = self.datapath.DeleteEndpoint(datapath_pb2.DeleteEndpointRequest(owner=owner), timeout=5)
        if not deleted.existed:  # else the datapath releases the addresses
            self.ipam.Release(ipam_pb2.ReleaseRequest(owner=owner), timeout=5)

    def relabel(self, owner, labels):
        """Replaces the labels; when it returns, the kernel enforces them."""
        request = datapath_pb2.UpdateEndpointRequest(owner=owner, manager=MANAGER)
        request.labels.labels.extend(labels)
        request.labels.SetInParent()  # also when the list is empty
        return self.call(self.datapath.UpdateEndpoint, request).endpoint

    def disconnect(self, owner):
        """Removes the endpoint. Without an endpoint it succeeds."""
        self.call(self.datapath.DeleteEndpoint, datapath_pb2.DeleteEndpointRequest(owner=owner))

    def reclaim(self, valid):
        """Deletes the endpoints of this manager whose owners are not valid."""
        request = datapath_pb2.ReclaimEndpointsRequest(manager=MANAGER, valid_owners=valid, none_valid=not valid)
        return self.call(self.datapath.ReclaimEndpoints, request).reclaimed

    def set_policies(self, manifests):
        """Replaces the policies of this manager with the manifests, and waits for the kernel."""
        request = policy_pb2.ReplacePoliciesRequest(manager=MANAGER, manifests=manifests, allow_empty=not manifests)
        revision = self.call(self.policy.ReplacePolicies, request).revision
        wait = policy_pb2.WaitForRevisionRequest(revision=revision)
        if not self.call(self.policy.WaitForRevision, wait).enforcing:
            raise RuntimeError(f"revision {revision} is stored, and no datapath is connected")
        return revision

    def watch(self, changed, removed):
        """Reports endpoints as they change, across restarts of the datapath."""
        known, token = set(), b""
        while True:
            try:
                # Without a token the stream starts with a listing: known endpoints
                # that are not listed were removed.
                listing, listed = not token, set()
                request = datapath_pb2.WatchEndpointsRequest(resume_token=token)
                for message in self.datapath.WatchEndpoints(request, wait_for_ready=True):
                    event = message.WhichOneof("event")
                    if event == "upsert":
                        known.add(owner_text(message.upsert.owner))
                        listed.add(owner_text(message.upsert.owner))
                        changed(message.upsert)
                    elif event == "delete" and owner_text(message.delete) in known:
                        known.remove(owner_text(message.delete))
                        removed(owner_text(message.delete))
                    elif event == "bookmark" and message.bookmark.snapshot_complete and listing:
                        for owner in known - listed:
                            removed(owner)
                        known &= listed
                    token = message.resume_token or token  # empty until the listing is complete
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.OUT_OF_RANGE:
                    token = b""  # another run of the datapath, or away for too long
                elif error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT):
                    raise
            time.sleep(0.2)


def lost_lease(error):
    """Whether the reason of an error is LEASE_LOST. The details are a google.rpc.Status,
    which Debian has no module for; the reason is a string in it."""
    return any(key == "grpc-status-details-bin" and b"LEASE_LOST" in value for key, value in error.trailing_metadata())


def owner_of(container):
    return workload_pb2.Owner(container_id=container, interface_name="eth0")


def owner_text(owner):
    return owner.container_id + "/" + owner.interface_name


def labels_of(namespace, pairs):
    """Parses labels KEY=VALUE. With a namespace, the workload belongs to it, and its
    labels have the source k8s; without one, it belongs to default."""
    source, labels = "cni", {}
    if namespace:
        source = "k8s"
        labels["io.kubernetes.pod.namespace"] = namespace
        labels["io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name"] = namespace
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            sys.exit(f"client: label {pair!r} is not KEY=VALUE")
        labels[key] = value
    return [workload_pb2.Label(source=source, key=key, value=value) for key, value in labels.items()]


def show(what, endpoint):
    print(what, owner_text(endpoint.owner), endpoint.identity, *endpoint.addresses, flush=True)


def arguments():
    parser = argparse.ArgumentParser(description="Connect network namespaces by Sluice without CNI.")
    parser.add_argument("--run-dir", "-run-dir", default="/run/sluice", help="directory of the sockets")
    parser.add_argument("--namespace", "-namespace", default="", help="namespace for policies; empty: default")
    parser.add_argument("--none", "-none", action="store_true",
                        help="confirm that the list of policies or containers is empty")
    parser.add_argument("--timeout", "-timeout", type=float, default=30,
                        help="seconds that a command may take; watch has no end")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments_of in {
        "connect": ["netns", "container", "labels"],
        "label": ["container", "labels"],
        "policies": ["files"],
        "watch": [],
        "reclaim": ["containers"],
        "disconnect": ["container"],
    }.items():
        command = commands.add_parser(name)
        for argument in arguments_of:
            command.add_argument(argument, nargs="*" if argument.endswith("s") and argument != "netns" else None)
    return parser, parser.parse_args()


def main():
    parser, args = arguments()
    node = Node(args.run_dir, args.timeout)
    if args.command in ("policies", "reclaim"):
        given = args.files if args.command == "policies" else args.containers
        if bool(given) == args.none:
            parser.error("name files or containers, or say -none")
    if args.command == "connect":
        labels = labels_of(args.namespace, args.labels)
        show("connected", node.connect(owner_of(args.container), args.netns, labels))
    elif args.command == "label":
        show("labelled", node.relabel(owner_of(args.container), labels_of(args.namespace, args.labels)))
    elif args.command == "policies":
        manifests = b""
        for name in args.files:
            with open(name, "rb") as file:
                manifests += b"\n---\n" + file.read()
        print("enforced revision", node.set_policies(manifests))
    elif args.command == "watch":
        with contextlib.suppress(KeyboardInterrupt):
            node.watch(lambda e: show("endpoint", e), lambda owner: print("removed", owner, flush=True))
    elif args.command == "reclaim":
        print("reclaimed", len(node.reclaim([owner_of(c) for c in args.containers])))
    elif args.command == "disconnect":
        node.disconnect(owner_of(args.container))


if __name__ == "__main__":
    try:
        main()
    except (grpc.RpcError, RuntimeError, OSError) as failure:
        text = f"{failure.code().name}: {failure.details()}" if isinstance(failure, grpc.RpcError) else failure
        sys.exit(f"client: {text}")
